"""Charts of metrics, with the script that draws them and without."""
