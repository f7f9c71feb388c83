"""Find what is wrong with a plan before any rank starts: what makes it cost more than it need."""
