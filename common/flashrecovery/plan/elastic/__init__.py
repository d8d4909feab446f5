"""Sizes of an elastic job: replicas, new ranks, who leaves, which samples belong to whom. Pure."""
