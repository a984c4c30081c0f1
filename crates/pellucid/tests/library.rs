//! The library on the tiny model: replies, streams, batches, tenants, cancellation, and every error that a caller can
//! cause.

use std::collections::HashMap;
use std::error::Error as _;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use futures_util::StreamExt;
use pellucid::{
    BeamParams, Device, EarlyStopping, Error, FileAccess, Finish, KvType, LoadEvent, Message, Pellucid, Preset,
    Repetition, Reply, Request, Speculation,
};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny.gguf");
const PROMPT: &str = "Once upon a time";
/// More than two blocks of the prefix cache, which hold 32 tokens each.
const LONG: &str = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with \
                    her friend Tom. One day, they saw a big red ball in the grass and wanted to play with it.";

fn open() -> Pellucid {
    Pellucid::builder(TINY).device(Device::Cpu).threads(1).open().unwrap()
}

fn text(prompt: &str) -> Request {
    Request::text(prompt).max_tokens(24)
}

/// Runs a future on this thread, without any runtime.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Waits until the engine has noticed something, and fails after ten seconds.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{what} did not happen within ten seconds");
}

fn texts(reply: &Reply) -> Vec<&str> {
    reply.choices.iter().map(|choice| choice.text.as_str()).collect()
}

#[test]
fn one_expression_opens_and_answers() {
    let reply = Pellucid::open(TINY).unwrap().chat(PROMPT).unwrap();
    assert!(reply.text().contains("there was a little girl named Lily"), "{reply}");
    assert_eq!(reply.to_string(), reply.text());
    assert!(matches!(reply.finish(), Finish::EndToken(Some(1))), "{:?}", reply.finish());
    assert_eq!(reply.summary.prompt_tokens, 5);
    assert!(reply.summary.completion_tokens > 50 && reply.summary.time_to_first_token.is_some());
}

#[test]
fn greedy_is_the_default_and_a_seed_makes_it_sample() {
    let model = open();
    let greedy = model.generate(text(PROMPT)).unwrap();
    assert_eq!(greedy.text(), model.generate(text(PROMPT).temperature(0.0).seed(5)).unwrap().text());
    let sampled: Vec<String> =
        (0..4).map(|seed| model.generate(text(PROMPT).seed(seed)).unwrap().into_text()).collect();
    assert!(sampled.iter().any(|one| *one != sampled[0]), "seeds differ: {sampled:?}");
    for (seed, reply) in sampled.iter().enumerate() {
        assert_eq!(*reply, model.generate(text(PROMPT).seed(seed as u64)).unwrap().text());
    }
}

#[test]
fn the_reported_seed_repeats_a_random_reply() {
    let model = open();
    let reply = model.generate(text(PROMPT).temperature(1.3)).unwrap();
    let again = model.generate(text(PROMPT).temperature(1.3).seed(reply.seed)).unwrap();
    assert_eq!(reply.text(), again.text());
}

#[test]
fn threads_do_not_change_a_reply() {
    let other = Pellucid::builder(TINY).device(Device::Cpu).threads(3).open().unwrap();
    assert_eq!(
        open().generate(text(PROMPT).seed(3)).unwrap().text(),
        other.generate(text(PROMPT).seed(3)).unwrap().text()
    );
}

#[test]
fn a_stream_is_the_whole_reply_in_pieces() {
    let model = open();
    let request = text(PROMPT).seed(9).choices(2).stop("Lily and");
    let whole = model.generate(request.clone()).unwrap();
    let mut joined = vec![String::new(); 2];
    let mut stream = model.stream(request).unwrap();
    for piece in stream.by_ref().take(7) {
        let piece = piece.unwrap();
        joined[piece.choice] += &piece.text;
    }
    for piece in &mut stream {
        let piece = piece.unwrap();
        joined[piece.choice] += &piece.text;
    }
    assert_eq!(joined, texts(&whole));
    assert_eq!(stream.seed(), 9);
    assert_eq!(texts(&stream.into_reply().unwrap()), texts(&whole), "pieces that were read are part of the reply");
}

#[test]
fn async_replies_equal_blocking_ones_without_a_runtime() {
    let model = open();
    let whole = model.generate(text(PROMPT).seed(4)).unwrap();
    let streamed = block_on(async {
        let mut pieces = model.stream_async(text(PROMPT).seed(4)).unwrap();
        let mut text = String::new();
        while let Some(piece) = pieces.next().await {
            text += &piece.unwrap().text;
        }
        text
    });
    assert_eq!(streamed, whole.text());
    assert_eq!(block_on(model.generate_async(text(PROMPT).seed(4))).unwrap().text(), whole.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn async_replies_run_on_tokio_side_by_side() {
    let model = open();
    let ask = |seed| {
        let model = model.clone();
        tokio::spawn(async move { model.generate_async(text(PROMPT).seed(seed)).await.unwrap().into_text() })
    };
    let tasks: Vec<_> = (0..4).map(ask).collect();
    for (seed, task) in tasks.into_iter().enumerate() {
        let alone = model.generate_async(text(PROMPT).seed(seed as u64)).await.unwrap();
        assert_eq!(task.await.unwrap(), alone.text());
    }
}

#[test]
fn a_batch_equals_single_requests_in_their_order() {
    // More requests than may wait and run together: the rest is submitted as others end.
    let model = Pellucid::builder(TINY).device(Device::Cpu).max_sequences(2).max_waiting(3).open().unwrap();
    let request = |i: u64| text(["The cat", "A big dog", "Tom and Lily"][i as usize % 3]).seed(i);
    let together = model.generate_all((0..12).map(request)).unwrap();
    for (i, reply) in together.iter().enumerate() {
        assert_eq!(reply.text(), model.generate(request(i as u64)).unwrap().text(), "request {i}");
    }
}

#[test]
fn dropping_a_stream_cancels_its_request() {
    let model = open();
    let mut stream = model.stream(Request::text(PROMPT).sampling(|params| params.min_tokens = 1500)).unwrap();
    assert!(stream.next().unwrap().is_ok());
    assert_eq!(model.stats().unwrap().cancelled_requests, 0);
    drop(stream);
    wait_until("the cancellation", || model.stats().unwrap().cancelled_requests == 1);
    let stats = model.stats().unwrap();
    assert_eq!((stats.num_running, stats.blocks_in_use, stats.finished_requests), (0, 0, 0));
}

#[test]
fn a_reply_outlives_its_model() {
    let stream = open().stream(text(PROMPT)).unwrap();
    let reply = stream.into_reply().unwrap();
    assert_eq!(reply.summary.completion_tokens, 24);
}

#[test]
fn tenants_find_their_own_prefixes_only() {
    let model = Pellucid::builder(TINY).device(Device::Cpu).tenant("alice").tenant("bob").open().unwrap();
    let cached = |tenant: Option<&str>| {
        let request = tenant.into_iter().fold(text(LONG), |request, tenant| request.tenant(tenant));
        model.generate(request).unwrap().summary.cached_tokens
    };
    assert_eq!(cached(Some("alice")), 0);
    assert!(cached(Some("alice")) >= 32);
    assert_eq!(cached(Some("bob")), 0, "bob does not see what alice asked");
    assert!(cached(Some("bob")) >= 32);
    assert_eq!(cached(None), 0, "nor does the tenant without a name");
}

#[test]
fn a_shared_system_prompt_is_found_by_every_tenant() {
    let builder = Pellucid::builder(TINY).device(Device::Cpu).tenant("alice").tenant("bob");
    let model = builder.shared_system(LONG).open().unwrap();
    let cached = |tenant: &str, user: &str| {
        let request = Request::chat(user).system(LONG).tenant(tenant).max_tokens(2);
        model.generate(request).unwrap().summary.cached_tokens
    };
    assert_eq!(cached("alice", "They played."), 0);
    assert!(cached("bob", "It was blue.") >= 32);
}

#[test]
fn a_quota_rejects_what_could_never_fit() {
    let model = Pellucid::builder(TINY).device(Device::Cpu).tenant_with_quota("alice", 64).open().unwrap();
    model.generate(text("A dog").tenant("alice")).unwrap();
    let error = model.generate(text(LONG).max_tokens(100).tenant("alice")).unwrap_err();
    assert!(matches!(&error, Error::Rejected(pellucid_engine::Error::ExceedsQuota { quota: 2, .. })), "{error:?}");
}

#[test]
fn stop_strings_choices_and_limits_shape_a_reply() {
    let model = open();
    let stopped = model.generate(Request::text(PROMPT).stop("Lily")).unwrap();
    assert_eq!(stopped.text(), ", there was a little girl named ");
    assert_eq!(*stopped.finish(), Finish::StopString("Lily".into()));
    assert_eq!(*model.generate(text(PROMPT)).unwrap().finish(), Finish::MaxTokens);
    let timed = model.generate(Request::text(PROMPT).timeout(Duration::ZERO)).unwrap();
    assert_eq!(*timed.finish(), Finish::Deadline);

    let several = model.generate(text(PROMPT).seed(20).choices(3)).unwrap();
    let alone = (20..23).map(|seed| model.generate(text(PROMPT).seed(seed)).unwrap().into_text());
    assert_eq!(texts(&several), alone.collect::<Vec<_>>());
    let best = model.generate(text(PROMPT).seed(20).best_of(3)).unwrap();
    assert!(texts(&several).contains(&best.text()));
}

#[test]
fn beams_are_ranked_by_their_scores() {
    let model = open();
    let beams = BeamParams { width: 4, num_returned: 3, length_penalty: 0.0, early_stopping: EarlyStopping::Never };
    let reply = model.generate(text(PROMPT).beams(beams)).unwrap();
    let scores: Vec<f64> = reply.choices.iter().map(|choice| choice.score.unwrap()).collect();
    assert_eq!(scores.len(), 3);
    assert!(scores.windows(2).all(|pair| pair[0] >= pair[1]), "{scores:?}");
    assert_eq!(model.generate(text(PROMPT).beam_search(4)).unwrap().choices.len(), 1);
}

#[test]
fn traces_and_log_probabilities_explain_each_token() {
    let model = open();
    let reply = model.generate(text(PROMPT).top_k(5).seed(2).logprobs(3).trace()).unwrap();
    let choice = &reply.choices[0];
    assert!(!choice.tokens.is_empty() && choice.traces.len() >= choice.tokens.len(), "the end token has a trace too");
    for (token, trace) in choice.tokens.iter().zip(choice.traces.iter().map(|trace| &trace.token)) {
        assert_eq!(token.id, trace.draw.winner.id);
        assert_eq!(token.logprobs.as_ref().unwrap().chosen, trace.logprob);
        assert!(trace.draw.entrants <= 5 && trace.steps.iter().any(|step| step.name == "top_k"));
    }
    let ids: Vec<u32> = choice.tokens.iter().map(|token| token.id).collect();
    assert_eq!(ids.iter().map(|&id| model.token_text(id)).collect::<String>(), choice.text);
}

#[test]
fn a_conversation_is_rendered_by_the_chat_template() {
    let model = open();
    let messages = vec![Message::system("Once"), Message::user("upon"), Message::assistant("a"), Message::user("time")];
    let conversation = model.generate(Request::from(messages.clone()).max_tokens(5)).unwrap();
    let same = Request::messages(messages[1..].to_vec()).system("Once").max_tokens(5);
    assert_eq!(conversation.text(), model.generate(same).unwrap().text());
    let one = model.generate(Request::chat("Once").max_tokens(5)).unwrap();
    assert!(conversation.summary.prompt_tokens > one.summary.prompt_tokens + 3, "every message is in the prompt");
    assert!(model.generate(Request::chat(PROMPT).preset(Preset::Creative).max_tokens(5)).is_ok());
}

#[test]
fn loading_reports_its_progress() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = events.clone();
    let builder = Pellucid::builder(TINY).device(Device::Cpu).context(256).kv_type(KvType::F32);
    let model = builder.on_event(move |event| seen.lock().unwrap().push(event)).open().unwrap();
    let events = events.lock().unwrap();
    let is_complete = |event: &LoadEvent| matches!(event, LoadEvent::Weights { loaded, total } if loaded == total);
    assert!(events.iter().any(is_complete), "{events:?}");
    assert_eq!((model.context_len(), model.info().kv_type), (256, KvType::F32));
    assert!(model.can_chat() && model.info().device.starts_with("cpu"));
}

#[test]
fn handles_can_be_sent_and_shared() {
    fn check<T: Send + Sync + 'static>() {}
    check::<Pellucid>();
    check::<Request>();
    check::<Reply>();
    check::<Error>();
    fn check_send<T: Send + 'static>() {}
    check_send::<pellucid::Builder>();
    check_send::<pellucid::ReplyStream>();
    check_send::<pellucid::AsyncReplyStream>();
}

/// Returns the error of opening a model; its cause is its source and is not repeated in its own text.
fn open_error(builder: pellucid::Builder) -> Error {
    let error = builder.open().map(drop).expect_err("the model cannot be opened");
    if let Some(source) = error.source() {
        assert!(!error.to_string().contains(&source.to_string()), "{error}: {source}");
    }
    error
}

#[test]
fn scratch_memory_is_that_of_the_largest_step() {
    let scratch = |num_sequences: usize| {
        let builder = Pellucid::builder(TINY).device(Device::Cpu).threads(1).max_sequences(num_sequences);
        builder.load().unwrap().info.scratch_bytes
    };
    // Another sequence adds the last hidden row, its norm and a row of logits: 64 + 64 + 512 values of 4 bytes.
    assert_eq!(scratch(2) - scratch(1), (64 + 64 + 512) * 4);
    // A step of a chunk has many more rows than sequences.
    assert!(scratch(1) > 100 * (64 + 64 + 512) * 4, "{}", scratch(1));
}

#[test]
fn errors_of_opening_name_the_cause() {
    let cpu = |path: &str| Pellucid::builder(path).device(Device::Cpu);
    let missing = open_error(cpu("/nowhere/model.gguf"));
    assert!(matches!(missing, Error::Open(_)) && missing.source().is_some(), "{missing:?}");
    let not_a_model = open_error(cpu(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")));
    assert!(matches!(not_a_model, Error::Open(_)), "{not_a_model:?}");
    let too_long = open_error(cpu(TINY).context(4096));
    let is_context = |error: &Error| matches!(error, Error::Load { source, .. } if source.to_string().contains("4096"));
    assert!(is_context(&too_long), "{too_long:?}");
    let no_gpu = open_error(Pellucid::builder(TINY).device(Device::Cuda(99)));
    assert!(matches!(no_gpu, Error::Device(_)) && no_gpu.source().is_some(), "{no_gpu:?}");
    assert!(matches!(open_error(cpu(TINY).fast(true)), Error::Device(_)));
    let no_memory = open_error(cpu(TINY).kv_memory(10_000));
    assert!(matches!(&no_memory, Error::KvMemory { source, .. } if source.context_len == 2048), "{no_memory:?}");
    let too_little = open_error(cpu(TINY).kv_memory(100_000));
    assert!(too_little.to_string().contains("holds 128 tokens in f16, but a whole context has 2048"), "{too_little}");
    // The heads of the tiny model have 8 values; a block of q8_0 has 32.
    assert!(matches!(open_error(cpu(TINY).kv_type(KvType::Q8_0)), Error::Start(_)));
}

#[test]
fn a_model_without_tokenizer_or_template_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, template| {
        let path = folder.path().join(name);
        pellucid_testing::tiny_model(&path, template);
        path
    };
    let cpu = |path: &std::path::Path| Pellucid::builder(path).device(Device::Cpu);
    let (plain, broken) = (write("plain", None), write("broken", Some("{% unknowntag %}")));
    let no_template = cpu(&plain).open().unwrap();
    let error = no_template.chat("hello").unwrap_err();
    assert!(matches!(error, Error::Prompt(pellucid_generate::Error::NoChatTemplate)), "{error:?}");
    assert!(!no_template.can_chat());
    assert!(no_template.generate(Request::text("hello").max_tokens(2)).is_ok(), "text needs no template");
    assert!(matches!(cpu(&broken).open().unwrap().chat("hello"), Err(Error::Template { .. })));
    assert!(matches!(open_error(cpu(&plain).shared_system("a")), Error::Prompt(_)));
    assert!(matches!(open_error(cpu(&broken).shared_system("a")), Error::Template { .. }));
    std::fs::remove_file(plain.join("tokenizer.json")).unwrap();
    let no_tokenizer = open_error(cpu(&plain));
    assert!(matches!(no_tokenizer, Error::Tokenizer { .. }), "{no_tokenizer:?}");
}

#[test]
fn errors_of_requests_name_the_cause() {
    let model = open();
    let error = |request: Request| model.generate(request).map(drop).expect_err("the request cannot be answered");
    assert!(matches!(error(text(PROMPT).tenant("eve")), Error::UnknownTenant { name } if name == "eve"));
    assert!(matches!(error(text(PROMPT).stop("")), Error::Option { name: "stop", .. }));
    assert!(matches!(error(text(PROMPT).system("Be brief.")), Error::Option { name: "system", .. }));
    assert!(matches!(error(Request::messages([Message::new("wizard", "hi")])), Error::Prompt(_)));
    assert!(matches!(error(Request::text("long ".repeat(20_000))), Error::Prompt(_)));
    let negative = error(text(PROMPT).temperature(-1.0));
    assert!(matches!(negative, Error::Rejected(_)) && !negative.is_temporary(), "{negative:?}");
    assert!(negative.source().unwrap().to_string().contains("temperature"), "{negative:?}");
    assert!(matches!(error(text(PROMPT).beam_search(3).top_k(4)), Error::Rejected(_)));
    assert!(matches!(error(text(PROMPT).choices(9)), Error::Rejected(_)), "more choices than sequences");
}

#[test]
fn a_full_queue_is_a_temporary_error() {
    let model = Pellucid::builder(TINY).device(Device::Cpu).max_sequences(1).max_waiting(1).open().unwrap();
    let endless = || model.stream(Request::text(PROMPT).sampling(|params| params.min_tokens = 1500));
    // One runs, one waits, and the third finds the queue full.
    let streams: Vec<_> = (0..3).map(|_| endless()).collect();
    let error = streams.into_iter().find_map(Result::err).expect("one request too many");
    assert!(error.is_temporary(), "{error:?}");
}

/// A model in memory does not need its file any more, and replies like a mapped one. Its hash is checked.
#[test]
fn a_model_in_memory_survives_the_truncation_of_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::copy(TINY, &path).unwrap();
    let open = |sha256: &HashMap<_, String>| {
        let notes = Arc::new(Mutex::new(Vec::new()));
        let noted = notes.clone();
        let builder = Pellucid::builder(&path).device(Device::Cpu).threads(1);
        let opened = builder
            .file_access(FileAccess::InMemory { sha256: sha256.clone() })
            .on_event(move |event| {
                if let LoadEvent::Note(note) = event {
                    noted.lock().unwrap().push(note);
                }
            })
            .open();
        (opened, notes.lock().unwrap().join("\n"))
    };
    // The note has the hash, which is then the expected one.
    let (opened, note) = open(&HashMap::new());
    assert!(note.contains("not compared"), "{note}");
    let hash = note.split("sha256 ").nth(1).unwrap()[..64].to_owned();
    drop(opened.unwrap());
    let mut known = HashMap::from([(path.canonicalize().unwrap(), hash.clone())]);
    let (opened, note) = open(&known);
    assert!(note.contains(&format!("{hash} (as recorded)")), "{note}");
    let model = opened.unwrap();
    std::fs::File::create(&path).unwrap();
    let mapped = Pellucid::builder(TINY).device(Device::Cpu).threads(1).open().unwrap();
    assert_eq!(model.generate(text(PROMPT)).unwrap().text(), mapped.generate(text(PROMPT)).unwrap().text());

    std::fs::copy(TINY, &path).unwrap();
    known.values_mut().for_each(|expected| *expected = "0".repeat(64));
    let (opened, _) = open(&known);
    let error = opened.unwrap_err().source().unwrap().to_string();
    assert!(error.contains(&hash) && error.contains("the file has changed"), "{error}");
}

#[test]
fn the_loop_guard_ends_a_reply_that_repeats_itself() {
    let model = open();
    // A single token is allowed, so the reply can only be a loop.
    let looping = || Request::text(PROMPT).sampling(|params| params.allowed_tokens = Some(vec![300])).max_tokens(300);
    let reply = model.generate(looping().loop_guard()).unwrap();
    assert_eq!(*reply.finish(), Finish::Repetition(Repetition { period: 1, repeats: 258 }));
    assert_eq!(*model.generate(looping()).unwrap().finish(), Finish::MaxTokens);
}

#[test]
fn drafters_change_no_reply() {
    let requests = || {
        let sampled = (0..4).map(|seed| text(PROMPT).temperature(0.9).seed(seed).logprobs(2).max_tokens(60));
        let predicted = text(PROMPT).prediction(", there was a little girl named Lily. She loved to play.");
        sampled.chain([text(PROMPT), text(LONG), predicted, text(PROMPT).speculate(false)])
    };
    let plain = open().generate_all(requests()).unwrap();
    for speculation in ["ngram", "suffix", "ngram,suffix"] {
        let speculation: Speculation = speculation.parse().unwrap();
        for speculation in [speculation.clone(), speculation.draft_model(TINY).max_draft_tokens(4)] {
            let builder = Pellucid::builder(TINY).device(Device::Cpu).threads(1).speculate(speculation.clone());
            let model = builder.open().unwrap();
            // Twice: the second time, the drafters have seen the replies.
            for _ in 0..2 {
                let replies = model.generate_all(requests()).unwrap();
                for (reply, plain) in replies.iter().zip(&plain) {
                    assert_eq!(reply.text(), plain.text(), "{speculation}");
                    assert_eq!(reply.choices[0].tokens, plain.choices[0].tokens, "{speculation}");
                    assert_eq!(reply.summary.completion_tokens, plain.summary.completion_tokens, "{speculation}");
                }
                assert_eq!(replies.last().unwrap().summary.speculation.total().drafted, 0, "speculate(false)");
            }
        }
    }
    let refused = open().generate(text(PROMPT).prediction("a").speculate(false)).unwrap_err();
    assert!(matches!(refused, Error::Option { name: "prediction", .. }), "{refused}");
}

#[test]
fn a_draft_model_shares_the_memory_for_keys_and_values() {
    let open = |speculation: Speculation| {
        let builder = Pellucid::builder(TINY).device(Device::Cpu).context(512).kv_memory(4 << 20);
        builder.speculate(speculation).open().unwrap()
    };
    let (alone, drafted) = (open(Speculation::OFF), open(Speculation::OFF.draft_model(TINY)));
    let (one, both) = (alone.info().kv_memory, drafted.info().kv_memory);
    // The draft model is the model itself, so it takes half of the budget.
    assert_eq!(both.num_blocks, one.num_blocks / 2);
    assert!(both.bytes() <= 4 << 20 && both.draft_bytes() == both.bytes() / 2);
    let draft = drafted.info().draft.as_ref().unwrap();
    assert_eq!((draft.weight_bytes, draft.kv_bytes), (drafted.info().weight_bytes, both.draft_bytes()));
    assert!(alone.info().draft.is_none() && alone.info().speculation.is_off());
}

#[test]
fn a_draft_model_with_another_vocabulary_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    pellucid_testing::tiny_model(folder.path(), None);
    let refused = Pellucid::builder(TINY).speculate(Speculation::OFF.draft_model(folder.path())).open().unwrap_err();
    assert!(matches!(&refused, Error::DraftVocabulary { difference, .. } if difference.id < 96), "{refused}");
    let message = refused.to_string();
    assert!(
        message.contains("have different vocabularies: token ") && message.contains("in the first vocabulary"),
        "{message}"
    );
    let missing = Pellucid::builder(TINY).speculate(Speculation::OFF.draft_model("no.gguf")).open().unwrap_err();
    assert!(matches!(missing, Error::Open(_)), "{missing}");
}
