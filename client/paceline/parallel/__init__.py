"""Training in parallel: buckets and DistributedDataParallel for NumPy modules."""
