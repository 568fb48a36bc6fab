"""Hosts without a batch system, reached by plain OpenSSH."""
