//! A long text out of nothing: an old-fashioned travel journal from a small grammar of our own
//! words. The same number of words gives the same text on every machine.

/// Words of the grammar, by their place in a sentence.
const PEOPLE: &[&str] = &[
    "the old captain",
    "my sister",
    "the lighthouse keeper",
    "a tired surveyor",
    "our cook",
    "the widow from the harbour",
    "the schoolmaster",
    "a boy with a lantern",
    "the ferryman",
    "the doctor",
    "two silent brothers",
    "the mapmaker",
];
const DEEDS: &[&str] = &[
    "carried the instruments up the hill",
    "counted the boats twice",
    "told us about the flood",
    "mended the sail by candlelight",
    "drew a line across the map",
    "waited for the evening tide",
    "wrote three letters and burned two",
    "found a path behind the mill",
    "measured the depth of the river",
    "sold us bread and a little salt",
    "sang of a city under the sand",
    "closed the shutters before the storm",
];
const PLACES: &[&str] = &[
    "beside the frozen lake",
    "in the long street of the weavers",
    "near the broken bridge",
    "at the foot of the white cliffs",
    "between the vineyards and the sea",
    "under the roof of the inn",
    "on the road to the northern pass",
    "behind the customs house",
    "where the two rivers meet",
    "in a garden full of bees",
];
const TIMES: &[&str] = &[
    "Early in the morning",
    "Toward noon",
    "When the fog had lifted",
    "On the third day",
    "After the bells had stopped",
    "Before anyone was awake",
    "In the last week of autumn",
    "As soon as the wind turned",
    "That same evening",
    "Long after midnight",
];
const REASONS: &[&str] = &[
    "because the bridge would not hold another winter",
    "for the water had risen again",
    "although nobody had asked for it",
    "so that the others could sleep",
    "since the road was closed to carts",
    "as if the war had never come this far",
    "while the horses rested",
    "and nobody spoke of it afterwards",
];
const REMARKS: &[&str] = &[
    "I made a note of it and thought no more about the matter.",
    "It cost us eleven coins and half a day.",
    "\"There is always another road,\" somebody said.",
    "We had seen nothing like it since we left home.",
    "The lamp went out; we did not light it again.",
    "How far it was, no one could tell us.",
    "Such things are easier to draw than to describe.",
    "By then the stars were out, and it was very cold.",
];

/// A generator of 64-bit numbers, good enough to pick words (SplitMix64).
///
/// # Source
/// Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
struct Picker(u64);

impl Picker {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn pick(&mut self, words: &'static [&'static str]) -> &'static str {
        let index = self.next() % words.len().max(1) as u64;
        usize::try_from(index)
            .ok()
            .and_then(|i| words.get(i))
            .copied()
            .unwrap_or("")
    }
}

/// At least `n_words` words of English prose in chapters and paragraphs.
pub fn journal(n_words: usize) -> String {
    let mut picker = Picker(4);
    let mut text = String::from("THE JOURNAL OF A SLOW ROAD\n");
    let mut done = 6;
    let mut chapter = 0;
    while done < n_words {
        chapter += 1;
        text.push_str(&format!("\nCHAPTER {chapter}\n\n"));
        for _ in 0..6 {
            let paragraph = paragraph(&mut picker);
            done += paragraph.split_whitespace().count();
            text.push_str(&paragraph);
            text.push_str("\n\n");
        }
    }
    text
}

fn paragraph(picker: &mut Picker) -> String {
    let n_sentences = 4 + picker.next() % 4;
    let sentences: Vec<String> = (0..n_sentences).map(|_| sentence(picker)).collect();
    sentences.join(" ")
}

fn sentence(picker: &mut Picker) -> String {
    let (who, what, place) = (picker.pick(PEOPLE), picker.pick(DEEDS), picker.pick(PLACES));
    match picker.next() % 5 {
        0 => picker.pick(REMARKS).to_owned(),
        1 => format!("{} {who} {what} {place}.", picker.pick(TIMES)),
        2 => format!(
            "{}, {place}, {who} {what}, {}.",
            picker.pick(TIMES),
            picker.pick(REASONS)
        ),
        3 => format!("{} {what}, {}.", capitalised(who), picker.pick(REASONS)),
        _ => {
            let (other, deed) = (picker.pick(PEOPLE), picker.pick(DEEDS));
            format!("{} {what} {place}; {other} {deed}.", capitalised(who))
        }
    }
}

fn capitalised(words: &str) -> String {
    let mut chars = words.chars();
    chars
        .next()
        .map_or_else(String::new, |c| c.to_uppercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_long_enough_and_the_same_each_time() {
        let text = journal(5000);

        let n_words = text.split_whitespace().count();
        assert!((5000..5600).contains(&n_words), "{n_words} words");
        assert_eq!(text, journal(5000));
        assert!(journal(9000).starts_with(&text));
    }

    #[test]
    fn sentences_vary() {
        let text = journal(5000);

        let mut paragraphs: Vec<&str> = text.split("\n\n").collect();
        let n_paragraphs = paragraphs.len();
        paragraphs.sort_unstable();
        paragraphs.dedup();
        assert_eq!(paragraphs.len(), n_paragraphs);
    }
}
