"""The planner process: membership, re-planning, request coordination, model store."""
