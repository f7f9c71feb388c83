"""`%%ranks`: a cell of a notebook that runs on several ranks."""
