"""The command line: run, status, inject, report, doctor."""
