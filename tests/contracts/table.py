"""Every strategy, as a user would ask for it. A new strategy joins with a row and inherits all contracts."""

STRATEGIES = {
    "sync": ("strategy=sync",),
    "sync together": ("strategy=sync", "strategy.order=together"),
}
