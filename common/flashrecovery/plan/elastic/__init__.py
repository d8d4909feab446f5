"""Sizes of an elastic job: replicas, new ranks, which ranks leave, which samples belong to which. Pure."""
