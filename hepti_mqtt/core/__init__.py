"""Types that all rooms share: names, errors, requests, plans, Programs, storages of matrices, profiles of devices."""
