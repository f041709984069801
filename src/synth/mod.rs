//! synth (to be written).
