//! Characters as the reference sees them, in bytes that need not be valid UTF-8.

use std::borrow::Cow;

/// What a space becomes before the merges: U+2581, lower one eighth block.
pub(crate) const ESCAPED_SPACE: &[u8] = "\u{2581}".as_bytes();
/// What stands for a byte that is no character.
const REPLACEMENT: &[u8] = "\u{fffd}".as_bytes();

/// Bytes of the character that begins with `first`, by its upper half alone.
///
/// # Source
/// llama.cpp `unicode.cpp:unicode_len_utf8`: a stray continuation byte counts as one.
pub(crate) fn char_len(first: u8) -> usize {
    match first >> 4 {
        0xf => 4,
        0xe => 3,
        0xc | 0xd => 2,
        _ => 1,
    }
}

/// Splits off the first character of `text`, cut short where the text ends.
pub(crate) fn first_char(text: &[u8]) -> &[u8] {
    let n = text.first().map_or(0, |&b| char_len(b));
    text.get(..n).unwrap_or(text)
}

/// One to four bytes as a number, distinct for distinct characters.
pub(crate) fn pack(character: &[u8]) -> u32 {
    character
        .iter()
        .fold(0, |packed, &byte| packed << 8 | u32::from(byte))
}

/// Replaces each space by [`ESCAPED_SPACE`].
pub(crate) fn escape_spaces(text: &[u8]) -> Vec<u8> {
    let n_spaces = text.iter().filter(|&&b| b == b' ').count();
    let mut escaped = Vec::with_capacity(text.len() + 2 * n_spaces);
    for run in text.split_inclusive(|&b| b == b' ') {
        match run.split_last() {
            Some((b' ', rest)) => {
                escaped.extend_from_slice(rest);
                escaped.extend_from_slice(ESCAPED_SPACE);
            }
            _ => escaped.extend_from_slice(run),
        }
    }
    escaped
}

/// Replaces each [`ESCAPED_SPACE`] by a space.
pub(crate) fn unescape_spaces(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        if let Some(tail) = rest.strip_prefix(ESCAPED_SPACE) {
            plain.push(b' ');
            rest = tail;
        } else {
            plain.push(byte);
            rest = tail;
        }
    }
    plain
}

/// Makes every byte sequence valid: what is no character becomes U+FFFD, one per byte.
///
/// # Source
/// llama.cpp `unicode.cpp:unicode_cpts_from_utf8`, which also takes overlong forms for the
/// character they spell and keeps surrogates. Two inputs abort there; here they count as no
/// character: code points above U+10FFFF and a space in overlong form.
pub(crate) fn replace_invalid(text: &[u8]) -> Cow<'_, [u8]> {
    if std::str::from_utf8(text).is_ok() {
        return Cow::Borrowed(text);
    }
    let mut valid = Vec::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        if let Some((character, n)) = decode(rest) {
            encode(character, &mut valid);
            rest = rest.get(n..).unwrap_or(&[]);
        } else {
            valid.extend_from_slice(REPLACEMENT);
            rest = rest.get(1..).unwrap_or(&[]);
        }
    }
    Cow::Owned(valid)
}

/// Reads one code point as the reference does; `None` where it sees no character.
fn decode(text: &[u8]) -> Option<(u32, usize)> {
    let first = *text.first()?;
    let (n, mask) = match first {
        0x00..=0x7f => return Some((u32::from(first), 1)),
        0xc0..=0xdf => (2, 0x1f),
        0xe0..=0xef => (3, 0x0f),
        0xf0..=0xf7 => (4, 0x07),
        _ => return None,
    };
    let tail = text.get(1..n)?;
    let mut character = u32::from(first & mask);
    for &byte in tail {
        if byte & 0xc0 != 0x80 {
            return None;
        }
        character = character << 6 | u32::from(byte & 0x3f);
    }
    let is_refused = character > 0x10_ffff || character == u32::from(b' ');
    (!is_refused).then_some((character, n))
}

/// Writes one code point, surrogates included.
fn encode(character: u32, out: &mut Vec<u8>) {
    let low = |shift: u32| 0x80 | (character >> shift & 0x3f);
    let bytes: &[u32] = match character {
        0..=0x7f => &[character],
        0x80..=0x7ff => &[0xc0 | character >> 6, low(0)],
        0x800..=0xffff => &[0xe0 | character >> 12, low(6), low(0)],
        _ => &[0xf0 | character >> 18, low(12), low(6), low(0)],
    };
    out.extend(bytes.iter().map(|&b| b.to_le_bytes()[0]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_text_is_not_copied() {
        assert!(matches!(
            replace_invalid("é ▁ 👩‍🚀".as_bytes()),
            Cow::Borrowed(_)
        ));
    }

    #[test]
    fn each_invalid_byte_becomes_one_replacement_character() {
        assert_eq!(
            &*replace_invalid(b"a\xff\x80b"),
            "a\u{fffd}\u{fffd}b".as_bytes()
        );
        assert_eq!(
            &*replace_invalid(b"\xe2\x96"),
            "\u{fffd}\u{fffd}".as_bytes()
        );
    }

    #[test]
    fn overlong_forms_and_surrogates_follow_the_reference() {
        assert_eq!(&*replace_invalid(b"\xc1\x81"), b"A");
        assert_eq!(&*replace_invalid(b"\xed\xa0\x80"), b"\xed\xa0\x80");
        assert_eq!(
            &*replace_invalid(b"\xf4\x90\x80\x80"),
            "\u{fffd}".repeat(4).as_bytes()
        );
        assert_eq!(
            &*replace_invalid(b"\xc0\xa0"),
            "\u{fffd}".repeat(2).as_bytes()
        );
    }

    #[test]
    fn escaping_and_unescaping_spaces_are_inverse() {
        let text = b"  a b  ";
        assert_eq!(escape_spaces(text), "▁▁a▁b▁▁".as_bytes());
        assert_eq!(unescape_spaces(&escape_spaces(text)), text);
    }

    #[test]
    fn first_char_is_cut_at_the_end_of_the_text() {
        assert_eq!(first_char("éa".as_bytes()), "é".as_bytes());
        assert_eq!(first_char(b"\xf0\x9f"), b"\xf0\x9f");
        assert_eq!(first_char(b""), b"");
    }
}
