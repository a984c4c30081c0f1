//! Tokenizers of small hand-made GGUF files: the meaning of the keys, and the errors of invalid files.

use std::path::PathBuf;

use pellucid_checkpoint::Checkpoint;
use pellucid_tokenizer::{Error, TokenKind, Tokenizer, VocabularyDifference};

/// A value of a GGUF key, of the kinds that tokenizers use.
#[derive(Clone)]
enum Field {
    Text(&'static str),
    Number(u32),
    Flag(bool),
    Texts(Vec<String>),
    Numbers(Vec<i32>),
    Scores(Vec<f32>),
}

/// Returns a GGUF file without tensors.
fn file(fields: &[(&str, Field)]) -> Vec<u8> {
    fn text(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }
    fn array(out: &mut Vec<u8>, kind: u32, len: usize) {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((len as u64).to_le_bytes());
    }
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend(0u64.to_le_bytes());
    out.extend((fields.len() as u64).to_le_bytes());
    for (key, field) in fields {
        text(&mut out, key);
        match field {
            Field::Text(value) => {
                out.extend(8u32.to_le_bytes());
                text(&mut out, value);
            }
            Field::Number(value) => {
                out.extend(4u32.to_le_bytes());
                out.extend(value.to_le_bytes());
            }
            Field::Flag(value) => {
                out.extend(7u32.to_le_bytes());
                out.push(u8::from(*value));
            }
            Field::Texts(values) => {
                array(&mut out, 8, values.len());
                values.iter().for_each(|value| text(&mut out, value));
            }
            Field::Numbers(values) => {
                array(&mut out, 5, values.len());
                values.iter().for_each(|value| out.extend(value.to_le_bytes()));
            }
            Field::Scores(values) => {
                array(&mut out, 6, values.len());
                values.iter().for_each(|value| out.extend(value.to_le_bytes()));
            }
        }
    }
    out
}

fn load(fields: &[(&str, Field)]) -> Result<Tokenizer, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("model.gguf");
    std::fs::write(&path, file(fields)).unwrap();
    Tokenizer::from_checkpoint(&Checkpoint::open(&path)?)
}

fn with<'k>(base: &[(&'k str, Field)], key: &'k str, field: Option<Field>) -> Vec<(&'k str, Field)> {
    let mut fields: Vec<_> = base.iter().filter(|(known, _)| *known != key).cloned().collect();
    fields.extend(field.map(|field| (key, field)));
    fields
}

fn texts(list: &[&str]) -> Field {
    Field::Texts(list.iter().map(|text| (*text).to_owned()).collect())
}

/// A SentencePiece vocabulary without byte tokens, in which merging could produce the control token `</s>`.
fn sentencepiece() -> Vec<(&'static str, Field)> {
    let tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab", "<", "/", "s", ">", "</", "s>", "<tag>"];
    let kinds = [2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4];
    let scores = [0., 0., 0., -9., -9., -9., -1., -2., -9., -9., -9., -9., -3., -3., 0.];
    vec![
        ("general.architecture", Field::Text("llama")),
        ("tokenizer.ggml.model", Field::Text("llama")),
        ("tokenizer.ggml.tokens", texts(&tokens)),
        ("tokenizer.ggml.token_type", Field::Numbers(kinds.to_vec())),
        ("tokenizer.ggml.scores", Field::Scores(scores.to_vec())),
    ]
}

fn byte_level() -> Vec<(&'static str, Field)> {
    let mut tokens = vec!["a", "b", "Ġ", "ab", "Ġab", "<|im_end|>", "<bos>", "n"];
    tokens.push("Ċ");
    vec![
        ("general.architecture", Field::Text("llama")),
        ("tokenizer.ggml.model", Field::Text("gpt2")),
        ("tokenizer.ggml.pre", Field::Text("gpt-2")),
        ("tokenizer.ggml.tokens", texts(&tokens)),
        ("tokenizer.ggml.token_type", Field::Numbers(vec![1, 1, 1, 1, 1, 1, 3, 1, 1])),
        ("tokenizer.ggml.merges", texts(&["a b", "Ġ ab"])),
        ("tokenizer.ggml.bos_token_id", Field::Number(6)),
    ]
}

#[test]
fn sentencepiece_merges_by_score_and_never_into_a_control_token() {
    let tokenizer = load(&sentencepiece()).unwrap();
    let ids = |text: &str| tokenizer.encode(text);
    let id = |piece: &str| tokenizer.id_of(piece).unwrap();
    assert_eq!(ids("ab"), [id("▁a"), id("b")], "▁a has the better score");
    assert_eq!(ids(" "), [id("▁"), id("▁")]);
    assert!(ids("").is_empty());
    assert_eq!(ids("</s>"), [id("▁"), id("</"), id("s>")], "ordinary text");
    assert_eq!(tokenizer.encode_special("</s>"), [2]);
    assert_eq!(tokenizer.encode_special("a</s>a"), [id("▁a"), 2, id("▁a")], "a space before each fragment");
    assert_eq!(ids("a<tag>b"), [id("▁a"), id("<tag>"), id("▁"), id("b")]);
    assert_eq!(ids("中"), [id("▁"), id("<unk>")]);
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.unknown()), (Some(1), Some(2), Some(0)));
    assert_eq!((tokenizer.prefix(), tokenizer.suffix()), (&[1][..], &[][..]));
    assert_eq!(tokenizer.end_ids(), [2]);
    assert_eq!(tokenizer.decode(&[1, id("▁a"), id("▁"), id("b")], true), "a b");
}

#[test]
fn flags_of_the_file_are_followed() {
    let plain = with(&sentencepiece(), "tokenizer.ggml.add_space_prefix", Some(Field::Flag(false)));
    let plain = with(&plain, "tokenizer.ggml.add_bos_token", Some(Field::Flag(false)));
    let plain = with(&plain, "tokenizer.ggml.add_eos_token", Some(Field::Flag(true)));
    let tokenizer = load(&plain).unwrap();
    assert_eq!(tokenizer.encode("ab"), [tokenizer.id_of("ab").unwrap()]);
    assert_eq!((tokenizer.prefix(), tokenizer.suffix()), (&[][..], &[2][..]));
    let ids = tokenizer.encode(" a");
    assert_eq!(tokenizer.decode(&ids, false), " a", "without a prefix, the space is text");
    let squeezed = with(&plain, "tokenizer.ggml.remove_extra_whitespaces", Some(Field::Flag(true)));
    let tokenizer = load(&squeezed).unwrap();
    assert_eq!(tokenizer.encode("  a   b "), tokenizer.encode("a b"));
}

#[test]
fn byte_level_merges_and_names() {
    let tokenizer = load(&byte_level()).unwrap();
    assert_eq!(tokenizer.encode("ab ab\n"), [3, 4, 8]);
    // The file calls it ordinary text, so that any text could end the turn.
    assert_eq!(tokenizer.token(5).unwrap().kind, TokenKind::Control);
    assert_eq!(tokenizer.end_ids(), [5]);
    assert_eq!(tokenizer.encode("<|im_end|>"), [7], "only the bytes that the vocabulary has");
    assert!(tokenizer.prefix().is_empty(), "GPT-2 prepends nothing");
    let llama = with(&byte_level(), "tokenizer.ggml.pre", Some(Field::Text("llama-bpe")));
    assert_eq!(load(&llama).unwrap().prefix(), [6], "Llama 3 does");
}

/// A WordPiece vocabulary as converters write it: U+2581 before tokens that begin a word.
fn word_piece() -> Vec<(&'static str, Field)> {
    let tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "aff", "able", "▁,", "▁e", "▁中"];
    vec![
        ("tokenizer.ggml.model", Field::Text("bert")),
        ("tokenizer.ggml.tokens", texts(&tokens)),
        ("tokenizer.ggml.token_type", Field::Numbers(vec![3, 3, 3, 3, 1, 1, 1, 1, 1, 1])),
        ("tokenizer.ggml.unknown_token_id", Field::Number(1)),
        ("tokenizer.ggml.cls_token_id", Field::Number(2)),
        ("tokenizer.ggml.seperator_token_id", Field::Number(3)),
    ]
}

#[test]
fn word_piece_divides_words_and_surrounds_texts() {
    let tokenizer = load(&word_piece()).unwrap();
    assert_eq!((tokenizer.prefix(), tokenizer.suffix()), (&[2][..], &[3][..]));
    assert_eq!(tokenizer.encode("Unaffable, É中 aff"), [4, 5, 6, 7, 8, 9, 1], "lower case, no accents");
    assert_eq!(tokenizer.encode("[CLS]"), [1, 1, 1], "text becomes no control token");
    assert_eq!(tokenizer.decode(&[4, 5, 6, 7], true), "unaffable ,");
    let mut cased = word_piece();
    cased[1].1 = texts(&["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "aff", "able", "▁,", "▁E", "▁中"]);
    assert_eq!(load(&cased).unwrap().encode("un Un É E"), [4, 1, 1, 8], "a cased vocabulary keeps the case");
}

#[test]
fn bad_files_are_errors_that_name_the_key() {
    let spm = sentencepiece();
    let bpe = byte_level();
    let cases: Vec<(Vec<(&str, Field)>, &str)> = vec![
        (with(&spm, "tokenizer.ggml.model", None), "tokenizer.ggml.model"),
        (
            with(&spm, "tokenizer.ggml.model", Some(Field::Text("rwkv"))),
            "\"rwkv\" is not supported; supported are gpt2, llama",
        ),
        (with(&spm, "tokenizer.ggml.model", Some(Field::Text("bert"))), "no unknown token"),
        (with(&word_piece(), "tokenizer.ggml.cls_token_id", Some(Field::Number(99))), "tokenizer.ggml.cls_token_id"),
        (with(&spm, "tokenizer.ggml.tokens", None), "tokenizer.ggml.tokens"),
        (with(&with(&spm, "tokenizer.ggml.token_type", None), "tokenizer.ggml.tokens", Some(texts(&[]))), "tokens"),
        (with(&spm, "tokenizer.ggml.scores", None), "tokenizer.ggml.scores"),
        (with(&spm, "tokenizer.ggml.scores", Some(Field::Scores(vec![0.0]))), "tokenizer.ggml.scores"),
        (with(&spm, "tokenizer.ggml.token_type", Some(Field::Numbers(vec![1; 3]))), "tokenizer.ggml.token_type"),
        (with(&spm, "tokenizer.ggml.bos_token_id", Some(Field::Number(15))), "tokenizer.ggml.bos_token_id"),
        (with(&spm, "tokenizer.ggml.eos_token_id", Some(Field::Number(u32::MAX))), "tokenizer.ggml.eos_token_id"),
        (with(&spm, "tokenizer.ggml.eot_token_id", Some(Field::Text("x"))), "tokenizer.ggml.eot_token_id"),
        (with(&spm, "tokenizer.ggml.add_bos_token", Some(Field::Number(1))), "tokenizer.ggml.add_bos_token"),
        (with(&bpe, "tokenizer.ggml.pre", None), "tokenizer.ggml.pre"),
        (
            with(&bpe, "tokenizer.ggml.pre", Some(Field::Text("nonesuch"))),
            "\"nonesuch\" is not supported; supported are default",
        ),
        (with(&bpe, "tokenizer.ggml.merges", None), "tokenizer.ggml.merges"),
        (with(&bpe, "tokenizer.ggml.merges", Some(texts(&["ab"]))), "tokenizer.ggml.merges"),
        (with(&bpe, "tokenizer.ggml.merges", Some(texts(&["a x"]))), "merge 0"),
        (with(&bpe, "tokenizer.ggml.merges", Some(texts(&["a b", "b a"]))), "merge 1"),
        (with(&bpe, "tokenizer.ggml.merges", Some(texts(&[""]))), "tokenizer.ggml.merges"),
    ];
    for (fields, expected) in cases {
        let error = load(&fields).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} should name {expected:?}");
    }
}

#[test]
fn odd_scores_do_no_harm() {
    let scores = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN, f32::MAX, -0.0, 0.0, 1.0];
    let scores: Vec<f32> = scores.iter().copied().cycle().take(15).collect();
    let tokenizer = load(&with(&sentencepiece(), "tokenizer.ggml.scores", Some(Field::Scores(scores)))).unwrap();
    assert_eq!(tokenizer.decode(&tokenizer.encode("ab</s>a b"), false), "ab</s>a b");
}

/// A vocabulary with the tokens of [`byte_level`] and more, each with its kind.
fn byte_level_and(more: &[(&str, i32)]) -> Tokenizer {
    let mut tokens = vec!["a", "b", "Ġ", "ab", "Ġab", "<|im_end|>", "<bos>", "n", "Ċ"];
    let mut kinds = vec![1, 1, 1, 1, 1, 1, 3, 1, 1];
    for (token, kind) in more {
        tokens.push(token);
        kinds.push(*kind);
    }
    let fields = with(&byte_level(), "tokenizer.ggml.tokens", Some(texts(&tokens)));
    load(&with(&fields, "tokenizer.ggml.token_type", Some(Field::Numbers(kinds)))).unwrap()
}

#[test]
fn vocabularies_are_compared_by_the_bytes_of_their_ids() {
    let plain = byte_level_and(&[]);
    let difference = |other: &Tokenizer| VocabularyDifference::find(&plain, other);
    assert_eq!(difference(&byte_level_and(&[])), None);
    assert_eq!(difference(&byte_level_and(&[("[PAD9]", 5), ("[PAD10]", 5)])), None, "padding");
    assert_eq!(VocabularyDifference::find(&byte_level_and(&[("x", 5)]), &byte_level_and(&[("y", 5)])), None);
    assert_eq!(VocabularyDifference::find(&byte_level_and(&[("x", 1)]), &byte_level_and(&[("x", 4)])), None, "kinds");

    let longer = difference(&byte_level_and(&[("[PAD9]", 5), ("Ġn", 1)])).expect("one has a further token");
    assert_eq!((longer.id, &longer.first, longer.second.as_deref()), (10, &None, Some(&b" n"[..])));
    assert_eq!(longer.to_string(), "token 10 is not used in the first vocabulary and \" n\" in the second");
    let other =
        with(&byte_level(), "tokenizer.ggml.tokens", Some(texts(&["a", "c", "Ġ", "d", "e", "f", "g", "n", "Ċ"])));
    let other = load(&with(&other, "tokenizer.ggml.merges", Some(texts(&[])))).unwrap();
    let first = difference(&other).expect("several differ");
    assert_eq!(first.to_string(), "token 1 is \"b\" in the first vocabulary and \"c\" in the second");
    let spm = load(&sentencepiece()).unwrap();
    assert_eq!(difference(&spm).expect("nothing is equal").id, 0);
}

#[test]
fn differing_tokens_are_shown_escaped_and_shortened() {
    let long = "é".repeat(10_000);
    let shown = |piece: &str| {
        let difference = VocabularyDifference::find(&byte_level_and(&[]), &byte_level_and(&[(piece, 3)]));
        difference.expect("a further token").to_string()
    };
    assert!(shown(&long).len() < 200);
    assert!(shown("\u{1b}[31mred").contains(r"\u{1b}[31mred"), "{}", shown("\u{1b}[31mred"));
}
