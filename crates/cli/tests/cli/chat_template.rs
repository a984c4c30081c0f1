//! `--chat-template` through the built program: it replaces the model's own template, and a bad one is an error at
//! start.

use crate::support::Home;
use crate::support::tiny_model::{TEMPLATE, tiny_model};

#[test]
fn it_replaces_the_models_own_template() {
    let home = Home::new();
    let file = home.path().join("chat.jinja");
    let file = file.to_str().unwrap();
    let run = |model: &str, flags: &[&str]| {
        let base = ["run", "Hello", "--model", model, "--device", "cpu", "--seed", "7", "-n", "12"];
        home.run(&[&base, flags].concat()).ok().to_owned()
    };
    let model = tiny_model(&home, Some(TEMPLATE));
    let own = run(&model, &[]);
    let other = TEMPLATE.replace("{{ m.role }}: ", "");
    std::fs::write(file, &other).unwrap();
    let replaced = run(&model, &["--chat-template", file]);
    assert_ne!(replaced, own);
    // A model without a template of its own, and one that has this template, give the same reply.
    let model = tiny_model(&home, Some(&other));
    assert_eq!(run(&model, &[]), replaced);
    std::fs::remove_dir_all(&model).unwrap();
    let model = tiny_model(&home, None);
    assert_eq!(run(&model, &["--chat-template", file]), replaced);
    let explained = home.run(&["explain", "Hello", "--model", &model, "-n", "1", "--json", "--chat-template", file]);
    assert!(explained.ok().contains('{'));
}

#[test]
fn a_bad_template_is_an_error_at_start() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let file = home.path().join("chat.jinja");
    let file = file.to_str().unwrap();
    let fails = |words: &[&str]| {
        for command in [&["run", "Hello"][..], &["explain", "Hello"], &["serve", "--port", "0"]] {
            let ran = home.run(&[command, &["--model", &model, "--device", "cpu", "--chat-template", file]].concat());
            assert_eq!(ran.status, Some(2), "{ran:?}");
            let error = &ran.stderr;
            words.iter().for_each(|word| assert!(error.contains(word), "{word:?} in {error}"));
        }
    };
    fails(&["--chat-template", "chat.jinja"]);
    std::fs::write(file, " \n").unwrap();
    fails(&["chat.jinja: the file is empty"]);
    std::fs::write(file, [0xff]).unwrap();
    fails(&["chat.jinja is not UTF-8", "expected a text"]);
    std::fs::write(file, "{% for m in messages %}\n{{ m.content \n{% endfor %}").unwrap();
    fails(&["--chat-template: chat template does not compile", "line 3"]);
    let ran = home.run(&["run", "Hello", "--model", &model, "--raw", "--chat-template", file]);
    assert!(ran.stderr.contains("cannot be used with"), "{ran:?}");
}
