"""Products with weights, `linear`: over f32, f16 and int8, for many rows and for few, with their register tiles."""
