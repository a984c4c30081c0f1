//! `pellucid completions` and `pellucid man`: files for shells and for `man`, made from the flags themselves.

use crate::flags::command_line::Cli;
use crate::terminal::output::Output;
use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;
use std::io::Write;
use std::path::PathBuf;

/// Print a script that completes commands and flags in a shell
///
/// For example, in bash:
///   pellucid completions bash > ~/.local/share/bash-completion/completions/pellucid
/// in fish:
///   pellucid completions fish > ~/.config/fish/completions/pellucid.fish
/// in zsh, with a folder of $fpath:
///   pellucid completions zsh > ~/.zfunc/_pellucid
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct CompletionsArgs {
    /// Shell to write for
    shell: Shell,
}

/// Write the manual pages of every command into a folder
///
/// One page for the program and one for each command, in section 1, as packages
/// install them.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct ManArgs {
    /// Folder to write to; it is created if it does not exist
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Program and version, at the foot of each page.
const SOURCE: &str = concat!("pellucid ", env!("CARGO_PKG_VERSION"));

pub(crate) fn completions(args: &CompletionsArgs, output: &mut Output) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "pellucid", &mut script);
    Ok(output.write_all(&script)?)
}

pub(crate) fn man(args: &ManArgs, output: &mut Output) -> Result<()> {
    let folder = &args.out;
    std::fs::create_dir_all(folder).with_context(|| format!("could not make the folder {}", folder.display()))?;
    let mut program = Cli::command();
    // Adds the global flags to each command, and to each its whole name.
    program.build();
    let commands = program.get_subcommands().filter(|command| command.get_name() != "help" && !command.is_hide_set());
    let mut pages = vec![("pellucid".to_owned(), program.clone())];
    for command in commands {
        pages.push((format!("pellucid-{}", command.get_name()), command.clone()));
    }
    for (name, command) in pages {
        let path = folder.join(format!("{name}.1"));
        let mut page = Vec::new();
        clap_mangen::Man::new(command)
            .source(SOURCE)
            .manual("Pellucid")
            .render(&mut page)
            .context("could not make a manual page")?;
        std::fs::write(&path, page).with_context(|| format!("could not write {}", path.display()))?;
        writeln!(output, "{}", path.display())?;
    }
    Ok(())
}
