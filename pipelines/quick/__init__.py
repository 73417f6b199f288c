"""Stage `quick`: whether speculation and a selector pay on this machine, without training."""
