//! The patch applier of `build.rs`: exact or not at all.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

#[path = "../build/patch.rs"]
mod patch;

use patch::{Tree, apply};

const SOURCE: &str = "one\ntwo\nthree\nfour\nfive\nsix\nseven\n";

fn tree() -> Tree {
    Tree::from([("dir/file.c".to_owned(), SOURCE.as_bytes().to_vec())])
}

/// A patch with the header that ours have, which must not be mistaken for a diff.
fn patch(hunks: &str) -> String {
    format!(
        "Subject: [PATCH] a\n\nBase: x\n---\ndiff --git a/dir/file.c b/dir/file.c\n\
         --- a/dir/file.c\n+++ b/dir/file.c\n{hunks}"
    )
}

fn patched(hunks: &str) -> Result<String, String> {
    let mut tree = tree();
    let touched = apply(&mut tree, &patch(hunks))?;
    assert_eq!(touched, ["dir/file.c"]);
    Ok(String::from_utf8(tree.remove("dir/file.c").unwrap()).unwrap())
}

#[test]
fn two_hunks_change_their_lines_and_keep_the_rest() {
    let hunks = "@@ -1,3 +1,4 @@ somewhere\n one\n+one and a half\n two\n three\n\
                 @@ -5,2 +6,2 @@\n-five\n+FIVE\n six\n";
    let expected = "one\none and a half\ntwo\nthree\nfour\nFIVE\nsix\nseven\n";
    assert_eq!(patched(hunks).unwrap(), expected);
}

#[test]
fn a_removed_line_that_looks_like_a_file_header_is_content() {
    let mut tree = Tree::from([("f".to_owned(), b"-- a/x\nb\n".to_vec())]);
    apply(
        &mut tree,
        "--- a/f\n+++ b/f\n@@ -1,2 +1,1 @@\n--- a/x\n b\n",
    )
    .unwrap();
    assert_eq!(tree["f"], b"b\n");
}

#[test]
fn an_offset_of_one_line_is_refused() {
    let error = patched("@@ -2,3 +2,4 @@\n one\n+x\n two\n three\n").unwrap_err();
    assert!(
        error.contains("line 2: expected \"one\", found \"two\\n\""),
        "{error}"
    );
}

#[test]
fn context_that_differs_is_refused() {
    assert!(
        patched("@@ -1,2 +1,3 @@\n one\n+x\n TWO\n")
            .unwrap_err()
            .contains("expected \"TWO\"")
    );
}

#[test]
fn an_applied_patch_does_not_apply_again() {
    let mut tree = tree();
    let patch = patch("@@ -1,2 +1,3 @@\n one\n+x\n two\n");
    apply(&mut tree, &patch).unwrap();
    assert!(apply(&mut tree, &patch).is_err());
}

#[test]
fn hunks_beyond_the_end_or_out_of_order_are_refused() {
    assert!(
        patched("@@ -90,1 +90,2 @@\n x\n+y\n")
            .unwrap_err()
            .contains("outside the file")
    );
    let order = "@@ -5,1 +5,2 @@\n five\n+x\n@@ -1,1 +1,2 @@\n one\n+y\n";
    assert!(patched(order).unwrap_err().contains("outside the file"));
}

#[test]
fn a_cut_hunk_an_unknown_file_and_an_empty_patch_are_refused() {
    assert!(
        patched("@@ -1,3 +1,4 @@\n one\n+x\n")
            .unwrap_err()
            .contains("cut short")
    );
    let mut tree = tree();
    let unknown = "--- a/none.c\n+++ b/none.c\n@@ -1,1 +1,2 @@\n one\n+x\n";
    assert!(
        apply(&mut tree, unknown)
            .unwrap_err()
            .contains("no such file")
    );
    assert_eq!(
        apply(&mut tree, "Subject: nothing\n").unwrap_err(),
        "changes nothing"
    );
}

#[test]
fn new_deleted_and_renamed_files_are_refused() {
    let new = "--- /dev/null\n+++ b/new.c\n@@ -0,0 +1,1 @@\n+x\n";
    assert!(
        apply(&mut tree(), new)
            .unwrap_err()
            .contains("belong in files/")
    );
    let renamed = "--- a/dir/file.c\n+++ b/dir/other.c\n@@ -1,1 +1,2 @@\n one\n+x\n";
    assert!(apply(&mut tree(), renamed).unwrap_err().contains("renames"));
}
