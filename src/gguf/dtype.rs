//! Tensor types: ggml's type id, its name and the layout of one block.
//!
//! # Source
//! ids: `ggml.h:ggml_type`; names and block sizes: `ggml.c:type_traits` and the `static_assert`s
//! in `ggml-common.h`, ggml 0.26.

use std::fmt;

/// Names one of ggml's tensor types; only ids that ggml 0.26 defines can exist.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DType(u32);

/// One row of the type table: id, name, elements per block, bytes per block.
type Row = (u32, &'static str, u64, u64);

/// Every type of ggml 0.26 in id order. Ids 4, 5, 31-33 and 36-38 were removed upstream.
const TABLE: &[Row] = &[
    (0, "f32", 1, 4),
    (1, "f16", 1, 2),
    (2, "q4_0", 32, 18),
    (3, "q4_1", 32, 20),
    (6, "q5_0", 32, 22),
    (7, "q5_1", 32, 24),
    (8, "q8_0", 32, 34),
    (9, "q8_1", 32, 36),
    (10, "q2_K", 256, 84),
    (11, "q3_K", 256, 110),
    (12, "q4_K", 256, 144),
    (13, "q5_K", 256, 176),
    (14, "q6_K", 256, 210),
    (15, "q8_K", 256, 292),
    (16, "iq2_xxs", 256, 66),
    (17, "iq2_xs", 256, 74),
    (18, "iq3_xxs", 256, 98),
    (19, "iq1_s", 256, 50),
    (20, "iq4_nl", 32, 18),
    (21, "iq3_s", 256, 110),
    (22, "iq2_s", 256, 82),
    (23, "iq4_xs", 256, 136),
    (24, "i8", 1, 1),
    (25, "i16", 1, 2),
    (26, "i32", 1, 4),
    (27, "i64", 1, 8),
    (28, "f64", 1, 8),
    (29, "iq1_m", 256, 56),
    (30, "bf16", 1, 2),
    (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66),
    (39, "mxfp4", 32, 17),
    (40, "nvfp4", 64, 36),
    (41, "q1_0", 128, 18),
    (42, "q2_0", 64, 18),
];

macro_rules! consts {
    ($($name:ident = $id:literal),* $(,)?) => {
        #[allow(non_upper_case_globals, reason = "ggml's own spelling: Q4_K, IQ2_XXS")]
        impl DType {
            $(
                #[doc = concat!("ggml type ", stringify!($name), ", id ", stringify!($id), ".")]
                pub const $name: Self = Self($id);
            )*
        }
        #[cfg(test)]
        const CONSTS: &[(DType, &str)] = &[$((DType::$name, stringify!($name))),*];
    };
}

consts! {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q8_1 = 9,
    Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, Q8_K = 15,
    IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22,
    IQ4_XS = 23, I8 = 24, I16 = 25, I32 = 26, I64 = 27, F64 = 28, IQ1_M = 29, BF16 = 30,
    TQ1_0 = 34, TQ2_0 = 35, MXFP4 = 39, NVFP4 = 40, Q1_0 = 41, Q2_0 = 42,
}

impl DType {
    /// Looks up a type by ggml's id; `None` for unknown and removed ids.
    pub fn from_id(id: u32) -> Option<Self> {
        TABLE.iter().find(|row| row.0 == id).map(|row| Self(row.0))
    }

    /// Looks up a type by name, in any letter case (`"q8_0"`, `"Q4_K"`).
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE
            .iter()
            .find(|row| row.1.eq_ignore_ascii_case(name))
            .map(|row| Self(row.0))
    }

    /// Lists every type, in id order.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| Self(row.0))
    }

    /// Returns ggml's type id.
    pub const fn id(self) -> u32 {
        self.0
    }

    /// Returns ggml's name of the type, for instance `"q8_0"` or `"q4_K"`.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Returns how many elements one block holds; 1 for plain types.
    pub fn block_len(self) -> u64 {
        self.row().2
    }

    /// Returns the bytes of one block.
    pub fn block_bytes(self) -> u64 {
        self.row().3
    }

    /// Computes the bytes of a row of `ne0` elements.
    ///
    /// `None` when `ne0` is not a whole number of blocks or the product does not fit.
    pub fn row_bytes(self, ne0: u64) -> Option<u64> {
        if !ne0.is_multiple_of(self.block_len()) {
            return None;
        }
        (ne0 / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Says whether the elements come in blocks with shared scales.
    pub fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    fn row(self) -> &'static Row {
        // Only ids of the table can be constructed; F32 stands in for the impossible case.
        TABLE
            .iter()
            .find(|row| row.0 == self.0)
            .unwrap_or(&(0, "f32", 1, 4))
    }
}

impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_and_table_agree_on_every_type() {
        assert_eq!(CONSTS.len(), TABLE.len());
        for (dtype, name) in CONSTS {
            assert!(
                dtype.name().eq_ignore_ascii_case(name),
                "{name} is {}",
                dtype.name()
            );
            assert_eq!(DType::from_id(dtype.id()), Some(*dtype));
            assert_eq!(DType::from_name(name), Some(*dtype));
        }
    }

    #[test]
    fn removed_and_unknown_ids_are_none() {
        for id in [4, 5, 31, 32, 33, 36, 37, 38, 43, u32::MAX] {
            assert_eq!(DType::from_id(id), None, "{id}");
        }
        assert_eq!(DType::from_name("q4_2"), None);
    }

    #[test]
    fn row_bytes_counts_blocks_and_refuses_partial_ones() {
        assert_eq!(DType::F32.row_bytes(7), Some(28));
        assert_eq!(DType::Q8_0.row_bytes(64), Some(68));
        assert_eq!(DType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(DType::Q8_0.row_bytes(33), None);
        assert_eq!(DType::F64.row_bytes(u64::MAX), None);
    }
}
