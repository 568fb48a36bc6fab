"""Views of a plan or a run. They do not depend on how a run was started."""
