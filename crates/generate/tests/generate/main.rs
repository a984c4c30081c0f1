//! Prompts, replies, calls, thoughts and guards over a scripted engine. One program, which links once.

mod call_formats;
mod calls;
mod choice_text;
mod generation;
mod guard;
mod prompts;
mod support;
mod thought_constraint;
mod thought_formats;
