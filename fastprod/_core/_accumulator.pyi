# Compiled; other extension modules cimport it.
