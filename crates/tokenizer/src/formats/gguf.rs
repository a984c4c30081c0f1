//! The tokenizer of a GGUF file, from its `tokenizer.ggml.*` keys.
//!
//! The keys do not describe the reference tokenizers fully. This file infers the rest from the pre-tokenizer's name or
//! the architecture.

use pellucid_checkpoint::Metadata;

use crate::added_tokens::{AddedToken, AddedTokens};
use crate::algorithms::bpe::{Bpe, BpeOptions};
use crate::algorithms::joinable_pairs::JoinablePairs;
use crate::algorithms::normalize::{Normalizer, Rewrite};
use crate::algorithms::pipeline::{Model, Pipeline, PreTokenizer, SpaceRule};
use crate::algorithms::pretokenize::{self, Named, bert_steps};
use crate::algorithms::reference_classes::nonspacing_marks;
use crate::algorithms::sentencepiece::SentencePieceBpe;
use crate::algorithms::wordpiece::{MAX_WORD_CHARS, WordPiece};
use crate::error::Error;
use crate::tokenizer::{END_NAMES, LeadingSpace, NamedIds, Tokenizer};
use crate::vocabulary::{METASPACE, Spelling, TokenKind, Vocabulary};

const MODELS: &[&str] = &["gpt2", "llama", "gemma4", "bert"];

pub(crate) const MODEL: &str = "tokenizer.ggml.model";
pub(crate) const PRE: &str = "tokenizer.ggml.pre";
pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(crate) const TYPES: &str = "tokenizer.ggml.token_type";
pub(crate) const SCORES: &str = "tokenizer.ggml.scores";
pub(crate) const MERGES: &str = "tokenizer.ggml.merges";
pub(crate) const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
pub(crate) const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
pub(crate) const SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
/// Begins a text for an encoder.
const CLS: &str = "tokenizer.ggml.cls_token_id";
/// Ends a text for an encoder; the format's own spelling.
const SEPARATOR: &str = "tokenizer.ggml.seperator_token_id";
pub(crate) const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

pub(crate) fn load(metadata: &Metadata) -> Result<Tokenizer, Error> {
    let model = match metadata.opt_str(MODEL)? {
        None | Some("none" | "no_vocab") => return Err(Error::Missing("the file has no tokenizer.ggml.model")),
        Some(model) => model,
    };
    match model {
        "gpt2" => load_byte_level(metadata),
        "llama" => load_sentencepiece(metadata),
        "gemma4" => load_gemma4(metadata),
        "bert" => load_word_piece(metadata),
        found => Err(Error::UnsupportedModel { found: found.to_owned(), supported: MODELS }),
    }
}

fn load_byte_level(metadata: &Metadata) -> Result<Tokenizer, Error> {
    let Named { stages, ignore_merges, add_bos, nfc } = pretokenize::named(metadata.str(PRE)?)?;
    let vocabulary = load_vocabulary(metadata, Spelling::ByteLevel)?;
    let named = load_named_ids(metadata, &vocabulary, NamedIds::default())?;
    let options = BpeOptions { byte_level: true, ignore_merges, ..BpeOptions::default() };
    let model = Model::Bpe(load_bpe(metadata, &vocabulary, options)?);
    let pipeline = Pipeline {
        pre_tokenizer: PreTokenizer::Ours { space: SpaceRule::Keep, stages, spelled_stages: Vec::new() },
        model,
        joinable_pairs: None,
    };
    let rewrites = if nfc { vec![Rewrite::Nfc] } else { Vec::new() };
    assemble(metadata, vocabulary, pipeline, rewrites, named, add_bos, LeadingSpace::Keep)
}

fn load_sentencepiece(metadata: &Metadata) -> Result<Tokenizer, Error> {
    let vocabulary = load_vocabulary(metadata, Spelling::Metaspace)?;
    let scores = metadata.f32s(SCORES)?;
    if scores.len() != vocabulary.len() {
        return Err(Error::invalid(SCORES, format!("{} scores", vocabulary.len()), scores.len()));
    }
    let usual = NamedIds { bos: Some(1), eos: Some(2), unknown: Some(0), ..NamedIds::default() };
    let named = load_named_ids(metadata, &vocabulary, usual)?;
    let space_prefix = metadata.opt_bool(SPACE_PREFIX)?.unwrap_or(true);
    let mut rewrites = Vec::new();
    if metadata.opt_bool("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false) {
        rewrites.push(Rewrite::SqueezeSpaces);
    }
    if space_prefix {
        rewrites.push(Rewrite::Prepend("▁".into()));
    }
    rewrites.push(Rewrite::Replace { from: " ".into(), to: "▁".into() });
    let spm = SentencePieceBpe::new(&vocabulary, scores.into_iter(), named.unknown);
    let tokens = (0..vocabulary.len() as u32).filter(|&id| vocabulary.is_mergeable(id));
    let joinable_pairs = JoinablePairs::new(tokens.map(|id| vocabulary.piece(id)));
    let pipeline = Pipeline {
        pre_tokenizer: PreTokenizer::Ours { space: SpaceRule::Keep, stages: Vec::new(), spelled_stages: Vec::new() },
        model: Model::SentencePieceBpe(spm),
        joinable_pairs: Some(joinable_pairs),
    };
    let leading = if space_prefix { LeadingSpace::StripOne } else { LeadingSpace::Keep };
    assemble(metadata, vocabulary, pipeline, rewrites, named, true, leading)
}

/// Loads Gemma 4: merges by rank over characters, with U+2581 for spaces and byte tokens for unknown characters.
fn load_gemma4(metadata: &Metadata) -> Result<Tokenizer, Error> {
    let vocabulary = load_vocabulary(metadata, Spelling::Metaspace)?;
    let named = load_named_ids(metadata, &vocabulary, NamedIds::default())?;
    let options =
        BpeOptions { byte_fallback: true, unknown: named.unknown, fuse_unknown: true, ..BpeOptions::default() };
    let bpe = load_bpe(metadata, &vocabulary, options)?;
    let joinable_pairs =
        (!bpe.fuses_unknown()).then(|| JoinablePairs::new(bpe.products().map(|id| vocabulary.piece(id))));
    let pipeline = Pipeline {
        pre_tokenizer: PreTokenizer::Ours { space: SpaceRule::Keep, stages: Vec::new(), spelled_stages: Vec::new() },
        model: Model::Bpe(bpe),
        joinable_pairs,
    };
    let rewrites = vec![Rewrite::Replace { from: " ".into(), to: "▁".into() }];
    assemble(metadata, vocabulary, pipeline, rewrites, named, true, LeadingSpace::Keep)
}

/// Loads WordPiece. U+2581 is before a token that begins a word, and nothing before one that continues it.
///
/// The file does not say whether text is lower-cased, as `do_lower_case` of the original tokenizer does: it is if no
/// ordinary token has a capital letter, because such a vocabulary could not spell one. Accents are removed then too.
fn load_word_piece(metadata: &Metadata) -> Result<Tokenizer, Error> {
    let vocabulary = load_vocabulary(metadata, Spelling::Metaspace)?;
    let with_piece = |piece: &str| vocabulary.id_of(piece);
    let usual = NamedIds {
        bos: with_piece("[CLS]"),
        eos: with_piece("[SEP]"),
        unknown: with_piece("[UNK]"),
        padding: with_piece("[PAD]"),
        ..NamedIds::default()
    };
    let named = load_named_ids(metadata, &vocabulary, usual)?;
    let named = NamedIds {
        bos: optional_id(metadata, &vocabulary, CLS)?.or(named.bos),
        eos: optional_id(metadata, &vocabulary, SEPARATOR)?.or(named.eos),
        ..named
    };
    let unknown = named.unknown.ok_or(Error::Missing("its WordPiece vocabulary has no unknown token"))?;
    // Some capital letters, such as the sign of the real numbers, have no lower case.
    let is_capital = |c: char| !c.to_lowercase().eq([c]);
    let is_cased =
        |id: &u32| vocabulary.kind(*id) == TokenKind::Normal && vocabulary.piece(*id).chars().any(is_capital);
    let mut rewrites = vec![Rewrite::CleanText, Rewrite::SpaceChinese];
    // Tokens in brackets are special in the original, whatever kind the file gives them.
    let ordinary = (0..vocabulary.len() as u32).filter(|&id| !vocabulary.piece(id).contains('['));
    if !ordinary.into_iter().any(|id| is_cased(&id)) {
        rewrites.extend([Rewrite::Nfd, Rewrite::Remove(nonspacing_marks()), Rewrite::Lowercase]);
    }
    let mark = METASPACE.to_string();
    let pipeline = Pipeline {
        pre_tokenizer: PreTokenizer::General { steps: bert_steps(), spelled: false },
        model: Model::WordPiece(WordPiece::new(&vocabulary, [&mark, ""], unknown, MAX_WORD_CHARS)),
        joinable_pairs: None,
    };
    let mut tokenizer = assemble(metadata, vocabulary, pipeline, rewrites, named, true, LeadingSpace::StripOne)?;
    // The separator belongs to every text; `add_eos_token` concerns the end token of other models.
    tokenizer.suffix = tokenizer.named.eos.into_iter().collect();
    Ok(tokenizer)
}

fn optional_id(metadata: &Metadata, vocabulary: &Vocabulary, key: &str) -> Result<Option<u32>, Error> {
    match metadata.opt_u32(key)? {
        Some(id) if id as usize >= vocabulary.len() => {
            Err(Error::invalid(key, format!("an id below {}", vocabulary.len()), id))
        }
        id => Ok(id),
    }
}

fn load_vocabulary(metadata: &Metadata, spelling: Spelling) -> Result<Vocabulary, Error> {
    let tokens = metadata.strings(TOKENS)?;
    let types = metadata.opt_i32s(TYPES)?;
    if let Some(types) = &types
        && types.len() != tokens.len()
    {
        return Err(Error::invalid(TYPES, format!("{} types", tokens.len()), types.len()));
    }
    let kind = |id: usize, piece: &str| {
        let kind = match types.as_ref().map_or(1, |types| types[id]) {
            1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            6 => TokenKind::Byte,
            _ => TokenKind::Unused,
        };
        // Some converted files have these as ordinary text, so that any text could end a turn.
        let ends_turn = matches!(kind, TokenKind::Normal | TokenKind::UserDefined) && END_NAMES.contains(&piece);
        if ends_turn { TokenKind::Control } else { kind }
    };
    Vocabulary::new(tokens.iter().enumerate().map(|(id, piece)| (piece, kind(id, piece))), spelling)
}

fn load_bpe(metadata: &Metadata, vocabulary: &Vocabulary, options: BpeOptions) -> Result<Bpe, Error> {
    let merges = metadata.strings(MERGES)?;
    // A piece may begin with a space, so the separator is searched after the first character.
    let split = |merge: &'_ str| -> Option<usize> {
        let first = merge.chars().next()?.len_utf8();
        merge[first..].find(' ').map(|at| at + first)
    };
    if let Some(bad) = merges.iter().find(|merge| split(merge).is_none()) {
        return Err(Error::invalid(MERGES, "two pieces separated by a space", format!("{bad:?}")));
    }
    let pairs = merges.iter().filter_map(|merge| split(merge).map(|at| (&merge[..at], &merge[at + 1..])));
    Bpe::new(vocabulary, pairs, options)
}

fn load_named_ids(metadata: &Metadata, vocabulary: &Vocabulary, usual: NamedIds) -> Result<NamedIds, Error> {
    let id = |name: &str, usual: Option<u32>| -> Result<Option<u32>, Error> {
        let stated = optional_id(metadata, vocabulary, &format!("tokenizer.ggml.{name}_token_id"))?;
        Ok(stated.or(usual.filter(|&id| (id as usize) < vocabulary.len())))
    };
    Ok(NamedIds {
        bos: id("bos", usual.bos)?,
        eos: id("eos", usual.eos)?,
        eot: id("eot", usual.eot)?,
        eom: id("eom", usual.eom)?,
        // Nothing depends on these two, and some converters write wrong ids: ignore errors.
        unknown: id("unknown", usual.unknown).unwrap_or(None),
        padding: id("padding", usual.padding).unwrap_or(None),
    })
}

fn assemble(
    metadata: &Metadata,
    vocabulary: Vocabulary,
    pipeline: Pipeline,
    rewrites: Vec<Rewrite>,
    named: NamedIds,
    add_bos: bool,
    leading_space: LeadingSpace,
) -> Result<Tokenizer, Error> {
    let flag = |key: &str, usual: bool| metadata.opt_bool(key).map(|value| value.unwrap_or(usual));
    let add_bos = flag(ADD_BOS, add_bos)?;
    let add_eos = flag(ADD_EOS, false)?;
    // Phi-3's SentencePiece tokenizers absorb the white space after control tokens; the file has no key for it.
    let absorbs_space = metadata.opt_str("general.architecture")? == Some("phi3")
        && matches!(pipeline.model, Model::SentencePieceBpe(_));
    let mut added = Vec::new();
    for id in 0..vocabulary.len() as u32 {
        if matches!(vocabulary.kind(id), TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown) {
            let mut token = AddedToken::plain(id, vocabulary.piece(id));
            token.rstrip = absorbs_space && !matches!(token.content.as_str(), "<unk>" | "<s>" | "<|endoftext|>");
            added.push(token);
        }
    }
    let tokenizer = Tokenizer {
        prefix: named.bos.filter(|_| add_bos).into_iter().collect(),
        suffix: named.eos.filter(|_| add_eos).into_iter().collect(),
        vocabulary,
        added: AddedTokens::new(added),
        added_normalized: AddedTokens::new(Vec::new()),
        guarded: Vec::new(),
        normalizer: Normalizer { rewrites },
        pipeline,
        leading_space,
        named,
        end_ids: Vec::new(),
        max_token_bytes: None,
    };
    Ok(tokenizer.finish(&[]))
}
