"""What an application does with jobs and runs: plan, prepare, submit, find, resume. It prints nothing.

`import launcher` offers the public part of it; the command line calls the rest as well.
"""
