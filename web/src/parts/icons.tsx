// Icons, drawn with strokes of the text's color.

const PATHS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  lens: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14M16 16l4 4",
  sliders: "M4 8h10M18 8h2M16 6v4M4 16h2M10 16h10M8 14v4",
  close: "M6 6l12 12M18 6L6 18",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M19 5l-2 2M7 17l-2 2",
  moon: "M19 14a8 8 0 0 1-9-9 8 8 0 1 0 9 9",
  half: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18v18M12 8l5 0M12 12h7M12 16h5",
  clip: "M8 12l6-6a3 3 0 0 1 5 4l-8 8a5 5 0 0 1-7-7l8-8",
  key: "M14 10a4 4 0 1 0-3 4l2 2h2v2h2v2h3v-3l-6-6",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" width="20" height="20" aria-hidden="true" focusable="false">
      <path
        d={PATHS[name]}
        fill="none"
        stroke="currentColor"
        stroke-width="2"
        stroke-linecap="round"
        stroke-linejoin="round"
      />
    </svg>
  );
}

export function Logo() {
  return (
    <svg class="logo" viewBox="0 0 32 32" width="26" height="26" aria-hidden="true" focusable="false">
      <circle cx="16" cy="16" r="11" fill="none" stroke="currentColor" stroke-width="5" />
    </svg>
  );
}
