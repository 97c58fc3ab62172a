"""Parts of the brain U-Net demo: data, model, training, limits, report and plot."""
