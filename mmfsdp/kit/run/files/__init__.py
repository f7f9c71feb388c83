"""The files of a run, the records in them, and one look at them. No process is started or asked here."""
