"""Other projects' ways in and out."""
