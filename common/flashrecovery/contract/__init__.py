"""What the recovery core needs to know about a framework: the contract that adapters implement."""
