"""Plug-ins with which decoding engines let a selector decide: what is copied, or how long all
requests' chains are."""
