"""Tests of megascale_lightning, in folders like those of the package; `acceptance` holds its laws."""
