"""From a recipe and a site to a submitted job."""
