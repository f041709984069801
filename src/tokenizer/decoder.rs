//! Token ids to text, one id at a time.

use super::Tokenizer;

/// Turns ids into text as they come, without ever splitting a character.
///
/// Bytes that may still become a character wait for the next id; bytes that cannot become one
/// are printed as U+FFFD.
#[derive(Debug)]
pub struct Decoder<'t> {
    tokenizer: &'t Tokenizer,
    pending: Vec<u8>,
    text: String,
    shows_control: bool,
}

impl<'t> Decoder<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer) -> Self {
        Self {
            tokenizer,
            pending: Vec::new(),
            text: String::new(),
            shows_control: false,
        }
    }

    /// Prints control tokens by name instead of leaving them out.
    #[must_use]
    pub fn with_control(mut self) -> Self {
        self.shows_control = true;
        self
    }

    /// Takes the next id; returns the text that is complete now.
    ///
    /// An id outside the vocabulary prints U+FFFD.
    pub fn push(&mut self, id: u32) -> &str {
        self.text.clear();
        if self.shows_control || !self.tokenizer.is_control(id) {
            match self.tokenizer.token_bytes(id) {
                Some(bytes) => self.pending.extend_from_slice(&bytes),
                None => self.pending.extend_from_slice("\u{fffd}".as_bytes()),
            }
        }
        let n_used = self.take_complete();
        self.pending.drain(..n_used);
        &self.text
    }

    /// Returns what waits, as U+FFFD: the text ends inside a character.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        self.text.push_str(&String::from_utf8_lossy(&self.pending));
        self.pending.clear();
        &self.text
    }

    /// Moves whole characters to `text`; returns how many bytes are used up.
    fn take_complete(&mut self) -> usize {
        let mut n_used = 0;
        loop {
            let rest = self.pending.get(n_used..).unwrap_or(&[]);
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    self.text.push_str(valid);
                    return n_used + valid.len();
                }
                Err(error) => {
                    let valid = rest.get(..error.valid_up_to()).unwrap_or(&[]);
                    self.text.push_str(&String::from_utf8_lossy(valid));
                    n_used += valid.len();
                    match error.error_len() {
                        None => return n_used,
                        Some(n) => {
                            self.text.push('\u{fffd}');
                            n_used += n;
                        }
                    }
                }
            }
        }
    }
}
