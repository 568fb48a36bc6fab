"""Checks of nodes, their network and their collectives: is it the job, or is it the cluster?"""
