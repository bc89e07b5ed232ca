"""This project's store under other engines: each module is a guest in one of them."""
