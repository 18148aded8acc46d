"""Run folders in object stores: a copy on this machine, in which the run trains and which is uploaded meanwhile."""
