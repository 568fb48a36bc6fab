"""Access to a host without launcher by plain OpenSSH: run commands, copy files, send the job's code."""
