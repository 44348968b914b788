"""The stream controller: which item goes to which worker, and when workers start, stop or move. Pure."""
