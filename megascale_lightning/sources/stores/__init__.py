"""Where files lie and how their bytes are read: here or in a store, compressed or not, again after errors."""
