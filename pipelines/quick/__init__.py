"""Stage `quick`: two minutes, no training: does speculation pay here, and does a selector?"""
