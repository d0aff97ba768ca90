"""Times whole forwards of the full-size model on one GPU; `python -m microbench.forward --help`."""
