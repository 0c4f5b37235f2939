"""Share work among processes of this machine or of a cluster, through Dask (the extra `distributed`).

This package does not know what the work is. Each process opens a `WorkerJob` once and calls it with one item after
another. Results arrive in the order of the items, whichever item finishes first. Dask is imported only when
`open_workers` has workers to open.
"""
