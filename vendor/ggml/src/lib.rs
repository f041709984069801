//! Empty: this manifest exists to pin the upstream source.
