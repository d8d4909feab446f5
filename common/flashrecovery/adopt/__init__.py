"""One task for each rank, started by a cluster's launcher, as a job that survives the death of a rank."""
