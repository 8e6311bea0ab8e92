"""What a bundle is: specifications, the manifest, presets and the drafter weights that ship."""
