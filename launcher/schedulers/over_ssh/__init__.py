"""Access by plain OpenSSH to a host that needs no launcher: run commands, copy files, send the job's code."""
