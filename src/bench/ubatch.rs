//! How many tokens llama.cpp computes in one graph run.

/// How the ubatch is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ubatch {
    /// The fastest of those that the sweep tries.
    Auto,
    /// This one.
    Fixed(usize),
}

impl std::str::FromStr for Ubatch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => match text.parse() {
                Ok(n) if n > 0 => Ok(Self::Fixed(n)),
                _ => Err("expected auto or a number of tokens".to_owned()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ubatch_is_auto_or_a_number_of_tokens() {
        assert_eq!("auto".parse(), Ok(Ubatch::Auto));
        assert_eq!("2048".parse(), Ok(Ubatch::Fixed(2048)));
        for wrong in ["", "0", "-1", "best"] {
            assert!(wrong.parse::<Ubatch>().is_err(), "{wrong}");
        }
    }
}
