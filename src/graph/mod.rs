//! graph (to be written).
