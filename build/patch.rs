//! Applies unified diffs to files in memory: every context line must stand exactly at the line
//! that the hunk names. No fuzz, no offset, no new and no deleted files.

use std::collections::BTreeMap;

/// A source tree: path relative to its root, with `/`, and the file's bytes.
pub type Tree = BTreeMap<String, Vec<u8>>;

/// Applies one patch file to `tree` and returns the paths it touched.
pub fn apply(tree: &mut Tree, patch: &str) -> Result<Vec<String>, String> {
    let mut touched = Vec::new();
    let mut lines = patch.lines().enumerate().peekable();
    while let Some((at, line)) = lines.next() {
        let Some(old) = line.strip_prefix("--- ") else {
            continue;
        };
        let Some(new) = lines
            .next_if(|(_, l)| l.starts_with("+++ "))
            .map(|(_, l)| &l[4..])
        else {
            continue;
        };
        let (Some(old), Some(new)) = (old.strip_prefix("a/"), new.strip_prefix("b/")) else {
            return Err(format!(
                "line {}: new and deleted files belong in files/",
                at + 1
            ));
        };
        if old != new {
            return Err(format!("line {}: renames {old} to {new}", at + 1));
        }
        let mut hunks = Vec::new();
        while let Some((_, header)) = lines.next_if(|(_, l)| l.starts_with("@@ ")) {
            let range = parse_header(header).ok_or_else(|| format!("bad hunk header: {header}"))?;
            let mut body = Vec::new();
            let (mut old_left, mut new_left) = (range.old_len, range.new_len);
            while old_left > 0 || new_left > 0 {
                let (_, l) = lines.next().ok_or_else(|| format!("{header}: cut short"))?;
                let (sign, text) = l.split_at_checked(1).unwrap_or((" ", ""));
                match sign {
                    " " => {
                        (old_left, new_left) = (old_left.wrapping_sub(1), new_left.wrapping_sub(1))
                    }
                    "-" => old_left = old_left.wrapping_sub(1),
                    "+" => new_left = new_left.wrapping_sub(1),
                    _ => return Err(format!("{header}: unexpected line {l:?}")),
                }
                body.push((sign, text));
            }
            hunks.push((range.old_start, header, body));
        }
        if hunks.is_empty() {
            return Err(format!("{old}: no hunks"));
        }
        let bytes = tree
            .get(old)
            .ok_or_else(|| format!("{old}: no such file in the source"))?;
        let text = std::str::from_utf8(bytes).map_err(|e| format!("{old}: {e}"))?;
        let patched = apply_hunks(text, &hunks).map_err(|e| format!("{old}: {e}"))?;
        tree.insert(old.to_owned(), patched.into_bytes());
        touched.push(old.to_owned());
    }
    if touched.is_empty() {
        Err("changes nothing".to_owned())
    } else {
        Ok(touched)
    }
}

type Hunk<'a> = (usize, &'a str, Vec<(&'a str, &'a str)>);

fn apply_hunks(text: &str, hunks: &[Hunk<'_>]) -> Result<String, String> {
    let source: Vec<&str> = text.split_inclusive('\n').collect();
    let mut out = String::with_capacity(text.len());
    let mut next = 0;
    for (start, header, body) in hunks {
        let start = start
            .checked_sub(1)
            .ok_or_else(|| format!("{header}: starts at line 0"))?;
        let before = source
            .get(next..start)
            .ok_or_else(|| format!("{header}: outside the file"))?;
        out.extend(before.iter().copied());
        next = start;
        for (sign, expected) in body {
            if *sign == "+" {
                out.push_str(expected);
                out.push('\n');
                continue;
            }
            let found = source.get(next).copied().unwrap_or("");
            if found.strip_suffix('\n').unwrap_or(found) != *expected {
                let line = next + 1;
                return Err(format!(
                    "{header}: line {line}: expected {expected:?}, found {found:?}"
                ));
            }
            if *sign == " " {
                out.push_str(found);
            }
            next += 1;
        }
    }
    out.extend(source[next..].iter().copied());
    Ok(out)
}

struct Range {
    old_start: usize,
    old_len: usize,
    new_len: usize,
}

/// Reads `@@ -12,5 +12,7 @@ ...`; a missing length means 1.
fn parse_header(header: &str) -> Option<Range> {
    let mut words = header.split(' ').skip(1);
    let mut side = |sign: char| -> Option<(usize, usize)> {
        let word = words.next()?.strip_prefix(sign)?;
        let (start, len) = word.split_once(',').unwrap_or((word, "1"));
        Some((start.parse().ok()?, len.parse().ok()?))
    };
    let (old_start, old_len) = side('-')?;
    let (_, new_len) = side('+')?;
    Some(Range {
        old_start,
        old_len,
        new_len,
    })
}
