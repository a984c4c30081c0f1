//! `--device` with several devices: replies, the fingerprint, and what is refused. The devices are all the CPU.

use crate::support::Home;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../pellucid/models/tiny.gguf");
const MIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../selftest/fixtures/goldens/qwen3-moe");

fn run(home: &Home, more: &[&str]) -> String {
    let words = ["run", "--model", TINY, "-n", "24", "--seed", "5", "--raw", "Once upon a time"];
    home.run(&[&words[..], more].concat()).ok().to_owned()
}

#[test]
fn several_devices_give_the_reply_of_one() {
    let home = Home::new();
    let alone = run(&home, &["--device", "cpu"]);
    for split in ["auto", "4,1", "1,4", "0,5"] {
        assert_eq!(run(&home, &["--device", "cpu,cpu", "--split", split]), alone, "--split {split}");
    }
    assert_eq!(run(&home, &["--device", "cpu,cpu,cpu", "--split", "2,1,2"]), alone);
}

#[test]
fn what_went_where_is_told() {
    let home = Home::new();
    let words = ["run", "--model", TINY, "-n", "2", "--raw", "x", "--device", "cpu,cpu", "--split"];
    let told = |split: &str| home.run(&[&words[..], &[split]].concat()).stderr;
    let layers = told("3,2");
    assert!(layers.contains("): layers 2 to 4, the output; ") && layers.contains("): the embedding, layers 0 to 1; "));
    assert!(layers.contains("the whole model on cpu ("), "{layers}");
    assert!(told("auto").contains("the other devices are not used"), "{}", told("auto"));
}

#[test]
fn prove_compares_devices_with_one_thread_of_one_device() {
    let home = Home::new();
    for (model, split) in [(TINY, "3,2"), (MIXTURE, "experts=1")] {
        let words = ["prove", model, "--device", "cpu,cpu", "--split", split, "--prompts", "4", "--longest", "20"];
        let ran = home.run(&[&words[..], &["--reply", "4", "--together", "3"]].concat());
        assert!(ran.ok().contains("one thread") && ran.ok().contains("proved"), "{ran:?}");
    }
}

#[test]
fn splits_that_cannot_be_are_refused() {
    let home = Home::new();
    for (more, expected) in [
        (&["--device", "cpu", "--split", "3,2"][..], "--split needs several devices"),
        (&["--device", "cpu,cpu", "--split", "3,3"], "for 2 devices, 5 together, found 2 numbers, 6 together"),
        (&["--device", "cpu,cpu", "--split", "5"], "found 1 numbers, 5 together"),
        (&["--device", "cpu,cpu", "--split", "experts=1"], "expected at most the 0 layers that have experts, found 1"),
        (&["--device", "cpu,cpu", "--split", "half"], "expected auto, numbers of layers such as 24,8, or experts=N"),
        (&["--device", "cpu,cpu", "--ranks", "2"], "--ranks: a model on several devices computes on one rank"),
    ] {
        let ran = home.run(&[&["run", "--model", TINY, "x"][..], more].concat());
        assert!(ran.usage().contains(expected), "{more:?}: {ran:?}");
    }
    let ran = home.run(&["embed", TINY, "x", "--device", "cpu,cpu"]);
    assert!(ran.usage().contains("computes on one device, found 2"), "{ran:?}");
}
