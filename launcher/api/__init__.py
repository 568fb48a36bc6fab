"""What an application does with jobs and runs: plan, prepare, submit, find, resume. Nothing is printed.

`import launcher` offers the public part. The command line also calls the rest.
"""
