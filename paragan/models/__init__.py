"""Models that travel: from other libraries, to other programs, onto a hub, into a page or a video."""
