"""Recorded traces played to the router's own policy and index in virtual time, on modelled workers."""
