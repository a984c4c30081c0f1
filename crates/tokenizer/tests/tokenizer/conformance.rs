//! Every vocabulary of the conformance data gives exactly the ids of the reference tokenizers.

use std::path::Path;

use pellucid_checkpoint::Checkpoint;
use pellucid_tokenizer::{Error, Tokenizer};

use crate::common;

const SEPARATOR: &str = "\n__ggml_vocab_test__\n";

fn check(vocabulary: &Path) -> Result<usize, Error> {
    let read = |suffix: &str| std::fs::read_to_string(format!("{}{suffix}", vocabulary.display())).unwrap();
    let (texts, expected) = (read(".inp"), read(".out"));
    let tokenizer = Tokenizer::from_checkpoint(&Checkpoint::open(vocabulary)?)?;
    let texts: Vec<&str> = texts.split(SEPARATOR).collect();
    let expected: Vec<&str> = expected.lines().collect();
    // If the file ends with the separator, the last text is empty and has no line of ids.
    let texts =
        if texts.last() == Some(&"") && texts.len() > expected.len() { &texts[..texts.len() - 1] } else { &texts };
    assert_eq!(texts.len(), expected.len(), "{}: a line of ids for each text", vocabulary.display());
    for (text, expected) in texts.iter().zip(expected) {
        let expected: Vec<u32> = expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
        let ids = tokenizer.encode(text);
        let pieces =
            |ids: &[u32]| ids.iter().map(|&id| tokenizer.token(id).unwrap().piece.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            ids,
            expected,
            "{}: {text:?}\n got {:?}\nwant {:?}",
            vocabulary.display(),
            pieces(&ids),
            pieces(&expected)
        );
        // WordPiece loses white space and case.
        if !vocabulary.to_string_lossy().contains("bert") {
            assert_eq!(tokenizer.decode(&ids, false), *text, "{}: decoded text", vocabulary.display());
        }
    }
    Ok(texts.len())
}

#[test]
fn ids_of_the_reference_tokenizers() {
    let Some(folder) = common::conformance("tokenizers") else { return };
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut checked = 0;
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "gguf")) {
        match check(file) {
            Ok(texts) => {
                println!("{}: {texts} texts", file.display());
                checked += 1;
            }
            Err(error) => panic!("{}: {error}", file.display()),
        }
    }
    assert!(checked >= 8, "expected at least eight vocabularies, found {checked}");
}
